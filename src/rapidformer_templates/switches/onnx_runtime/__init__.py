"""ONNX Runtime under torch.compile: capture blocks, export them to ONNX, and run them forward and backward."""

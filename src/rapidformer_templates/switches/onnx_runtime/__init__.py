"""ONNX Runtime under torch.compile: blocks captured, exported to ONNX, and run forward and backward."""

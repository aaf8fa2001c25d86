#!/bin/bash
TP=${TP:-2}
GPUS_PER_NODE=8
NNODES=2
MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 11008
    --num-attention-heads 32
    --seq-length 4096
    --max-position-embeddings 4096
    --use-rotary-position-embeddings
    --rotary-percent 1.0
    --swiglu
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model models/llama
)
case "$TP" in
    1)
        PARALLEL="--use-megatron-fsdp"
        ;;
    *)
        PARALLEL="--tensor-model-parallel-size $TP --sequence-parallel --use-distributed-optimizer --overlap-param-gather"
        ;;
esac
torchrun --nproc-per-node $GPUS_PER_NODE --nnodes=$NNODES pretrain_gpt.py ${MODEL_ARGS[@]} $PARALLEL \
    --micro-batch-size 2 --global-batch-size 256 --train-iters 5000 --data-path corpus_text_document --split 99,1,0 \
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style WSD --lr-wsd-decay-iters 500 --lr-warmup-iters 200 \
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --clip-grad 1.0 --bf16 \
    --save checkpoints/llama --load checkpoints/start --save-interval 500 --eval-iters 0 --seed 42 \
    --rampup-batch-size 32 32 1000000 --wandb-project pretraining --wandb-exp-name llama

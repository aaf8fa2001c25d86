#!/bin/bash
# Runs a model of 1.3 billion parameters; don't change the sizes
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NUM_NODES=1
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
CHECKPOINT_PATH=${1:-"checkpoints/gpt"} #<path>
DATA_PATH=$2

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
)
GPT_MODEL_ARGS=(
    --num-layers 24
    --hidden-size 2048
    --num-attention-heads 16
    --seq-length 2048
    --max-position-embeddings 2048
    --attention-backend auto # Can use (flash/fused/unfused/local)
)
TRAINING_ARGS="
    --micro-batch-size 1 \
    --global-batch-size 64 \
    --train-samples 64000 \
    --lr-decay-samples 32000 \
    --weight-decay 0.1 \
    --adam-beta2 0.95 \
    --init-method-std 0.006 \
    --fp16 \
    --lr 6.0e-5 \
    --lr-decay-style cosine \
    --min-lr 6.0e-6 \
    --lr-warmup-fraction .001 \
"
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 2
    --pipeline-model-parallel-size 2
    --num-layers-per-virtual-pipeline-stage 6
    --sequence-parallel
)
MORE="--recompute-activations"
if [ "$WORLD_SIZE" == "16" ]; then
    MORE="--fp8-format hybrid"
fi
OUTPUT_ARGS=(
    --log-interval 100
    --save-interval 10000
    --save $CHECKPOINT_PATH
    --load $CHECKPOINT_PATH
    --tensorboard-dir "${CHECKPOINT_PATH}/tensorboard"
    --overlap-grad-reduce
    --brand-new-argument 3
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \
    ${GPT_MODEL_ARGS[@]} $TRAINING_ARGS ${MODEL_PARALLEL_ARGS[@]} $MORE \
    --data-path 0.3 $DATA_PATH 0.7 other_text_document --vocab-file vocab.json --merge-file merges.txt \
    ${OUTPUT_ARGS[@]}

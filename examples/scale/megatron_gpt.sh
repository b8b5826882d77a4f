#!/usr/bin/env bash
# Megatron-LM's pretrain_gpt.py with onepass, on several machines. On each, in a clone of Megatron-LM (core 0.19):
#
#     MASTER=HOST NODES=2 GPUS=8 megatron_gpt.sh --data-path /shared/data/text_document --save /shared/run --load /shared/run ...
#
# Flags of pretrain_gpt.py at the end come on top, last ones win. The model is Llama 3 8B's shape.
# onepass: -m onepass.integrations.megatron installs its functions, --spec takes its layers, --cross-entropy-fusion-impl linear
# its loss without logits. Without Transformer Engine or Apex these stand in for Megatron's unfused ones.
# Run by hand: core 0.19.1's clone, PyTorch 2.13, two nodes on one CPU host, gloo, Megatron's CUDA calls answered by the CPU
# (docs/notes/0044-recipes.md). tests/scale/test_recipes.py runs this file with a stand-in for torchrun. Only read: checkpoints,
# overlapped communication, several hosts, NCCL.
set -eu
exec torchrun \
    --nnodes "${NODES:-2}" --nproc-per-node "${GPUS:-8}" --max-restarts 3 \
    --rdzv-backend c10d --rdzv-endpoint "${MASTER:?must be the host of one node, as all reach it}:${PORT:-29500}" \
    -m onepass.integrations.megatron pretrain_gpt.py \
    --spec onepass.integrations.megatron gpt_layer_spec --transformer-impl local \
    --cross-entropy-loss-fusion --cross-entropy-fusion-impl linear \
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \
    --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm --disable-bias-linear \
    --position-embedding-type rope --rotary-base 500000 --untie-embeddings-and-output-weights \
    --attention-dropout 0 --hidden-dropout 0 --seq-length 8192 --max-position-embeddings 8192 \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Llama-3.1-8B \
    --tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
    --micro-batch-size 1 --global-batch-size 128 --train-iters 10000 --bf16 \
    --lr 3e-4 --min-lr 3e-5 --lr-warmup-iters 500 --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0 \
    --eval-iters 10 --eval-interval 1000 --save-interval 1000 --log-interval 10 \
    --no-create-attention-mask-in-dataloader --no-masked-softmax-fusion --exit-signal-handler "$@"

# NVIDIA's PyTorch image brings torch, Triton, NCCL and Transformer Engine; the tools below are all that is missing.
FROM nvcr.io/nvidia/pytorch:26.06-py3
WORKDIR /workspace/megatron
COPY . .
RUN make setup
ENV PATH=/workspace/megatron/.venv/bin:$PATH PYTHONPATH=/workspace/megatron
CMD ["bash"]

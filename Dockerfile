# NVIDIA's PyTorch image brings torch, Triton, NCCL and Transformer Engine; what else is needed is small.
# docker build --build-arg BASE_IMAGE=<NVIDIA's PyTorch image, from where you get it> .
ARG BASE_IMAGE=nvidia/pytorch:latest
FROM ${BASE_IMAGE}
WORKDIR /workspace/megatron
COPY . .
RUN make setup
ENV PATH=/workspace/megatron/.venv/bin:$PATH PYTHONPATH=/workspace/megatron
CMD ["bash"]

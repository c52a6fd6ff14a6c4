# Not built here: no container engine was at hand.
#
#   docker build -t align .                                 runs on a CPU
#   docker build -t align --build-arg TORCH_INDEX=URL .     runs on CUDA; URL is the wheel index that
#                                                           PyTorch's install page names for your CUDA
#   docker run --rm -v "$PWD:/data" align precompute-ref data.parquet --model model
#
# With CUDA, add --gpus all to `docker run`; the host needs NVIDIA's driver and container toolkit.
ARG PYTHON=3.12
FROM python:${PYTHON}-slim
ARG TORCH_INDEX=""

# DeepSpeed asks for a compiler when it builds one of its own kernels.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /src
COPY . .
RUN pip install --no-cache-dir --constraint constraints.txt \
        ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} torch \
    && pip install --no-cache-dir --constraint constraints.txt '.[peft]'

WORKDIR /data
ENTRYPOINT ["align"]

#!/bin/sh
# Fetches NVIDIA's CUDA compiler from the Python package index into target/nvcc, where the cuda crate's build finds it.
# Needs python3 with pip and venv, a C++ compiler, and about 300 MB. Nothing is installed outside this repository.
set -eu
cd "$(dirname "$0")/.."
into=target/nvcc
if [ -x "$into/bin/nvcc" ]; then
    echo "$into/bin/nvcc is there"
    exit 0
fi
mkdir -p target
rm -rf target/nvcc-venv "$into"
python3 -m venv target/nvcc-venv
target/nvcc-venv/bin/python -m pip install --quiet --disable-pip-version-check \
    nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 \
    nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85
ln -s "$(echo "$PWD"/target/nvcc-venv/lib/python3*/site-packages/nvidia/cu13)" "$into"
"$into/bin/nvcc" --version | tail -n 1

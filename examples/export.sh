#!/usr/bin/env bash
# A run as a Hugging Face directory (transformers, vLLM) and as a GGUF file (llama.cpp).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
tightfit train pretrain.yaml -o output=runs/exported -o steps=10 "$@"
tightfit export runs/exported exported
tightfit export runs/exported exported.gguf
tightfit sample exported -p "Bread wants" -n 20

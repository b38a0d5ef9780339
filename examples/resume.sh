#!/usr/bin/env bash
# A run that is stopped after 20 of 50 steps, goes on to its end, and is then trained for 10 steps more.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
tightfit train pretrain.yaml -o output=runs/resumed --stop-after 20 "$@"
tightfit train runs/resumed --resume
tightfit train runs/resumed --resume -o steps=60

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the images without a container engine and tests them: the CPU image serves a model,
# restarts, and answers from disk; the CUDA image's steps run on a stand-in for its base, a Debian
# with the files of the upstream wheel, which can't run.
#
#   scripts/image_test.sh          as root; needs buildah, mmdebstrap, curl and `make env`
#
# Takes some ten minutes and 15 GB, all of it under build/image; the last lines are the results.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PORT=${PORT:-8000}
WORK=$PWD/build/image
PYTHON=$PWD/.venv/bin/python
MODEL=$PWD/build/models/smollm2-135m
CPU_IMAGE=localhost/pykvcache:cpu
CUDA_IMAGE=localhost/pykvcache:cuda
START_S=300
UPSTREAM=$("$PYTHON" -c 'import tomllib; print(next(
    pin["version"] for pin in tomllib.load(open("upstream.toml", "rb"))["upstream"]
    if pin["target"] == "cuda"))')

fail() { echo "image_test: $*" >&2; exit 1; }
say() { echo "image_test: $*" >&2; }

for tool in buildah mmdebstrap curl; do
    command -v "$tool" >/dev/null || fail "$tool is missing: apt-get install $tool"
done
[ "$(id -u)" = 0 ] || fail "must run as root: it makes a root filesystem and changes into it"
[ -x "$PYTHON" ] || fail "$PYTHON is missing: run \`make env\`"

# Its own storage, so that nothing of it is left in the machine's and `rm -r` undoes it.
storage=(--root "$WORK/storage" --runroot "$WORK/run" --storage-driver vfs)
b() { buildah "${storage[@]}" "$@"; }

server=
end() {
    if [ -n "$server" ]; then
        kill "$server" 2>/dev/null || true
    fi
}
trap end EXIT
b rm --all >/dev/null # what a run that was interrupted has left

# -- Images ----------------------------------------------------------------------------------------

make_base() {
    [ -f "$WORK/base.tar" ] || mmdebstrap --quiet --variant=minbase bookworm "$WORK/base.tar"
    local container
    container=$(b from scratch)
    b add --quiet "$container" "$WORK/base.tar" / >/dev/null
    b commit --quiet --rm "$container" localhost/base >/dev/null
}

# A Debian that has the upstream wheel's files, and its command, where pip would put them, and of
# its dependencies those that the build looks for.
make_cuda_stand_in() {
    local container wheel
    wheel=$("$PYTHON" - <<'PYTHON'
import os, sys
from pathlib import Path
sys.path.insert(0, "scripts")
from distribution.fetch import upstream_wheel
from distribution.upstream import choose, load
pin = choose(load(Path("upstream.toml")), {"VLLM_TARGET_DEVICE": "cuda"}, lambda: True)
print(upstream_wheel(pin, os.environ, lambda message: print(message, file=sys.stderr)))
PYTHON
    )
    container=$(b from localhost/base)
    b run --isolation chroot "$container" -- sh -c \
        'apt-get -qq update && apt-get -qq install --yes --no-install-recommends python3-pip' \
        >/dev/null 2>&1
    local pip=(b run --isolation chroot --volume "$(dirname "$wheel"):/wheels:ro" "${mounts[@]}"
        "$container" -- python3 -m pip install --quiet --no-compile --root-user-action=ignore
        --break-system-packages)
    "${pip[@]}" packaging typer 2>/dev/null
    "${pip[@]}" --no-deps --no-index "/wheels/$(basename "$wheel")"
    b commit --quiet --rm "$container" localhost/cuda-stand-in >/dev/null
}

build() { # target, image, options
    local target=$1 image=$2
    shift 2
    b build --quiet --isolation chroot --format docker --layers=false --target "$target" \
        --tag "$image" "$@" . >/dev/null
}

bytes_of() { b inspect --type image --format '{{.Manifest}}' "$1" | # the layers, uncompressed
    "$PYTHON" -c 'import json, sys; print(sum(layer["size"] for layer in json.load(sys.stdin)["layers"]))'; }

# -- Serving ---------------------------------------------------------------------------------------

ask() { # file for the answer; prints the seconds
    curl --silent --show-error --fail --max-time 300 --noproxy '*' --output "$1" \
        --write-out '%{time_total}' --header 'Content-Type: application/json' \
        --data "@$WORK/request.json" "http://127.0.0.1:$PORT/v1/completions"
}

metric() { # name; prints the sum over its labels
    curl --silent --fail --noproxy '*' "http://127.0.0.1:$PORT/metrics" |
        awk -v name="$1" '$1 ~ "^" name "[{ ]*" && $1 !~ "^#" { sum += $NF } END { printf "%d\n", sum }'
}

# The root is elsewhere than in the image: with chroot isolation buildah mounts the image's own volume
# over what is asked for at the same place.
inside() { # command: runs it in the container as the image's user
    b run --isolation chroot --user 10001:10001 --volume "$MODEL:/model:ro" \
        --volume "$WORK/root:/kv" --env PYKVCACHE_ROOT=/kv --volume "$WORK/pid:/pid" \
        --env VLLM_CPU_KVCACHE_SPACE=1 --env HF_HUB_OFFLINE=1 --env VLLM_NO_USAGE_STATS=1 \
        --env HEALTH_PORT="$PORT" "$container" -- "$@"
}

start() { # log
    rm -f "$WORK/pid/server"
    # A container's first process has no name outside of it: it says its id before it becomes vLLM.
    # shellcheck disable=SC2016
    inside sh -c 'echo $$ >/pid/server; exec "$@"' sh "${entry_point[@]}" /model \
        --served-model-name model --dtype float32 --max-model-len 4096 --port "$PORT" \
        >"$1" 2>&1 &
    local running=$! second
    for ((second = 0; second < START_S; second++)); do
        server=$(cat "$WORK/pid/server" 2>/dev/null || true)
        kill -0 "$running" 2>/dev/null || { tail -n 40 "$1" >&2; fail "the server ended; see $1"; }
        if inside pykvcache-health >/dev/null 2>&1; then
            return
        fi
        sleep 1
    done
    fail "not healthy within $START_S s; see $1"
}

stop() {
    kill "$server"
    wait || true
    server=
}

wait_for_files() {
    local second
    for ((second = 0; second < 60; second++)); do
        [ "$(metric vllm:kv_offload_stores_pending)" = 0 ] && [ "$(count_files)" = "$FILES" ] && return
        sleep 1
    done
    fail "$(count_files) files after a minute, expected $FILES"
}

count_files() { find "$WORK/root" -name '*.kv' | wc -l; }

# -- The run ---------------------------------------------------------------------------------------

mkdir -p "$WORK/pid"
rm -rf "$WORK/root"
mkdir "$WORK/root"
chown 10001:10001 "$WORK/root" "$WORK/pid"
FILES=8 # of 256 tokens
"$PYTHON" scripts/model.py "$MODEL"
"$PYTHON" - "$MODEL" $((FILES * 256 + 16)) >"$WORK/request.json" <<'PYTHON'
import json, sys
from pathlib import Path
sys.path.insert(0, "scripts")
from serving import Prompts
prompt = Prompts(Path(sys.argv[1])).of(int(sys.argv[2]), 1)
print(json.dumps({"model": "model", "prompt": prompt, "max_tokens": 16, "temperature": 0}))
PYTHON
readarray -t mounts < <("$PYTHON" scripts/image_pip.py "$WORK/pip")

say "base"
make_base
say "CPU image"
SECONDS=0
# This machine's pip is configured for torch; an index that can't be reached costs its time-outs.
build cpu "$CPU_IMAGE" --build-arg CPU_BASE=localhost/base --build-arg TORCH_INDEX= "${mounts[@]}"
cpu_s=$SECONDS
say "CUDA image on a stand-in of vLLM $UPSTREAM"
make_cuda_stand_in
SECONDS=0
build cuda "$CUDA_IMAGE" --build-arg CUDA_BASE=localhost/cuda-stand-in "${mounts[@]}"
cuda_s=$SECONDS

container=$(b from "$CUDA_IMAGE")
cuda_version=$(b run --isolation chroot "$container" -- \
    python3 -c 'import importlib.metadata as m; print(m.version("vllm"))')
# Every file is as RECORD says, the untouched ones of the base included.
b run --isolation chroot "$container" -- python3 - <<'PYTHON' || fail "RECORD isn't true"
import base64, hashlib, importlib.metadata
for file in importlib.metadata.files("vllm"):
    if file.hash:
        digest = hashlib.new(file.hash.mode, file.locate().read_bytes()).digest()
        assert base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == file.hash.value, file
PYTHON
b rm "$container" >/dev/null

container=$(b from "$CPU_IMAGE")
readarray -t entry_point < <(b inspect --format '{{range .Docker.Config.Entrypoint}}{{println .}}{{end}}' "$CPU_IMAGE" | sed '/^$/d')
say "first server"
start "$WORK/server-1.log"
cold_s=$(ask "$WORK/answer-1.json")
wait_for_files
[ "$(metric vllm:kv_offload_load_bytes_total)" = 0 ] || fail "the first server loaded something"
stop
say "second server"
start "$WORK/server-2.log"
warm_s=$(ask "$WORK/answer-2.json")
loaded=$(metric vllm:kv_offload_load_bytes_total)
stop
[ "$loaded" -gt 0 ] || fail "the second server loaded nothing from $WORK/root"
text() { "$PYTHON" -c 'import json, sys; print(json.load(open(sys.argv[1]))["choices"][0]["text"])' "$1"; }
[ "$(text "$WORK/answer-1.json")" = "$(text "$WORK/answer-2.json")" ] || fail "the answers differ"

mb() { echo $(($1 / 1000000)); }
cat <<RESULTS
CPU image: built in $cpu_s s, $(mb "$(bytes_of "$CPU_IMAGE")") MB over a base of $(mb "$(bytes_of localhost/base)") MB
CUDA image: vLLM $UPSTREAM became $cuda_version, built in $cuda_s s, adds $(($(bytes_of "$CUDA_IMAGE") - $(bytes_of localhost/cuda-stand-in))) bytes to its base
Prompt of $((FILES * 256 + 16)) tokens: cold $cold_s s, after a restart $warm_s s, $loaded bytes loaded, same answer
RESULTS

#!/usr/bin/env bash
# All that is measured of a layer over two GPUs of one host, in parts with a time limit each, 4 minutes in all:
#
#     bash benchmarks/two_gpus.sh OUT
#
# writes OUT/*.json, OUT/*.svg and OUT/*.log. Compiled programs are kept in OUT/cache: a part that did not end in time gets
# further in the next run.
set -u
out=${1:?a folder for the results}
mkdir -p "$out"
export JAX_COMPILATION_CACHE_DIR="$out/cache" JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
python=${PYTHON:-python}

part() {  # NAME SECONDS COMMAND...: its output is shown, and kept
  local name=$1 seconds=$2
  shift 2
  echo "== $name"
  timeout -k 5 "$seconds" "$@" >"$out/$name.log" 2>&1
  echo "rc $?"
  tail -n 25 "$out/$name.log"
}

bench() {  # NAME SECONDS FLAGS...
  local name=$1 seconds=$2
  shift 2
  part "$name" "$seconds" "$python" -m jmx.cli bench --model gpt-oss-120b --mesh ep=2 --seed 1 --json "$out/$name.json" "$@"
}

part bits 20 "$python" -m pytest -q -n 0 -m gpu tests/test_peer.py tests/test_peer_lines.py \
  -k "lines and (bfloat16 or thousand or layers)"
# Few sizes a process: all programs of a process are compiled before anything is timed.
bench a 40 --exchange peer,peer_lines,gather,rows --tokens 1,16
bench b 40 --exchange peer,peer_lines,gather,rows --tokens 4,64
bench c 40 --exchange peer,gather,rows --tokens 256,1024 --layers 4
bench d 40 --exchange gather,rows --tokens 4096,8192 --layers 2 --repeats 3
bench chunks 30 --exchange gather --chunks 1,2,4 --tokens 1024,8192 --layers 2 --repeats 3
part skew 30 "$python" benchmarks/skewed_routing.py gpt-oss-120b --mesh ep=2 --tokens 64,1024 --layers 4 --repeats 3 \
  --json "$out/skew.json"
reports=()
for name in a b c d; do
  [ ! -e "$out/$name.json" ] || reports+=("$out/$name.json")
done
[ ${#reports[@]} -eq 0 ] || "$python" benchmarks/mesh_picture.py "${reports[@]}" "$out/exchanges.svg"
[ ! -e "$out/chunks.json" ] || "$python" benchmarks/mesh_picture.py "$out/chunks.json" "$out/chunks.svg"

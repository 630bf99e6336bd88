#!/usr/bin/env bash
# All that is measured of a layer over two GPUs of one host, in parts with a time limit each:
#
#     bash benchmarks/two_gpus.sh OUT [PART...]
#
# Parts, in this order: bits a b c d chunks skew; without any, all of them, which take at most 8 minutes. Writes
# OUT/*.json, OUT/*.svg and OUT/*.log. Of a part that did not end in time, OUT/*.json.part has the rows measured so far.
# Most of the time goes into tracing and compiling: compiled programs are kept in OUT/cache, for other parts and runs.
set -u
out=${1:?a folder for the results}
shift
parts=" ${*:-bits a b c d chunks skew} "
for name in $parts; do
  case $name in
    bits | a | b | c | d | chunks | skew) ;;
    *) echo "error: PART (=$name) must be bits, a, b, c, d, chunks or skew" >&2; exit 2 ;;
  esac
done
mkdir -p "$out"
export JAX_COMPILATION_CACHE_DIR="$out/cache" JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}  # without multicast over NVLink, which can put GPUs out of service
python=${PYTHON:-python}
model=${MODEL:-gpt-oss-120b}

part() {  # NAME SECONDS COMMAND...: its output is shown, and kept; returns its exit code
  local name=$1 seconds=$2 start=$SECONDS code
  shift 2
  [[ $parts == *" $name "* ]] || return 0
  echo "== $name"
  timeout -k 5 "$seconds" "$@" >"$out/$name.log" 2>&1
  code=$?
  tail -n 25 "$out/$name.log"
  echo "rc $code after $((SECONDS - start)) s of $seconds"
  return $code
}

bench() {  # NAME SECONDS FLAGS...
  local name=$1 seconds=$2
  shift 2
  part "$name" "$seconds" "$python" -m jmx.cli bench --model "$model" --mesh ep=2 --seed 1 --json "$out/$name.json" "$@"
}

# An exchange that runs at no size would end a part, with nothing measured; and one that hangs would, too.
peer=peer,
if ! timeout 60 "$python" -c 'import sys; from jmx.parallel import peer; sys.exit(peer.fault(2))'; then
  peer=
  parts=${parts/ bits / }
fi
lines=${peer:+peer_lines,}
part bits 60 "$python" -m pytest -q -n 0 -m gpu tests/test_peer.py tests/test_peer_lines.py \
  -k "lines and (bfloat16 or thousand or layers)" || lines=
# Few sizes a process: all programs of a process are compiled before anything is timed.
bench a 60 --exchange "${peer}${lines}gather,rows" --tokens 1,16
bench b 60 --exchange "${peer}${lines}gather,rows" --tokens 4,64
bench c 75 --exchange "${peer}gather,rows" --tokens 256,1024 --layers 4
bench d 90 --exchange gather,rows --tokens 4096,8192 --layers 2 --repeats 3
bench chunks 75 --exchange gather --chunks 1,2,4 --tokens 1024,8192 --layers 2 --repeats 3
[[ $parts != *" skew "* ]] || rm -f "$out/skew.json"  # it replaces no file
part skew 45 "$python" benchmarks/skewed_routing.py "$model" --mesh ep=2 --tokens 64,1024 --layers 4 --repeats 3 \
  --json "$out/skew.json"

report() {  # NAME: the file with rows of a part, of this run or an earlier one
  for file in "$out/$1.json" "$out/$1.json.part"; do
    [ ! -e "$file" ] || { echo "$file"; break; }
  done
}
mapfile -t reports < <(for name in a b c d; do report "$name"; done)
[ ${#reports[@]} -eq 0 ] || "$python" benchmarks/mesh_picture.py "${reports[@]}" "$out/exchanges.svg"
chunks=$(report chunks)
[ -z "$chunks" ] || "$python" benchmarks/mesh_picture.py "$chunks" "$out/chunks.svg"

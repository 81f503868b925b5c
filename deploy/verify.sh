#!/bin/sh
# Run a built image as production would, and check what no linter sees.
#
#   sh deploy/verify.sh IMAGE [run options ...]        such as  wavefill:cpu --memory 2g
#
# ENGINE is podman or docker (podman if both are there); PORT is the port on this host (18000);
# WAIT is how many seconds the server may take to become healthy (120).
# Checked: it starts with a read-only root file system, without capabilities, as a user that is not
# root, under an init; its own HEALTHCHECK passes; the built-in model answers a chat, whole and
# streamed; metrics are there; SIGTERM ends it with exit code 0.
set -u

image=${1:?usage: sh deploy/verify.sh IMAGE [run options ...]}
shift
engine=${ENGINE:-$(command -v podman >/dev/null 2>&1 && echo podman || echo docker)}
port=${PORT:-18000}
name=wavefill-verify-$$
url=http://127.0.0.1:$port
failed=0

pass() { printf '  ok    %-24s %s\n' "$1" "$2"; }
fail() { printf '  FAIL  %-24s %s\n' "$1" "$2"; failed=1; }
ask() { "$engine" exec "$name" python3 -c "$1"; }
clean() { "$engine" rm -f "$name" >/dev/null 2>&1; }
trap clean EXIT

healthy() {
    if [ "$engine" = podman ]; then
        # Without systemd nobody calls podman's checks: call it by hand.
        podman healthcheck run "$name" >/dev/null 2>&1
    else
        [ "$(docker inspect "$name" --format '{{.State.Health.Status}}')" = healthy ]
    fi
}

# The host's network: the check needs no bridge, and WAVEFILL_PORT is what the HEALTHCHECK reads.
"$engine" run -d --name "$name" --network host -e "WAVEFILL_PORT=$port" \
    -e WAVEFILL_HOST=127.0.0.1 --read-only --tmpfs /tmp --cap-drop ALL \
    --security-opt no-new-privileges "$@" "$image" >/dev/null || { fail start "$engine run"; exit 1; }

tries=0
until healthy; do
    tries=$((tries + 1))
    [ "$tries" -ge "${WAIT:-120}" ] && break
    [ "$("$engine" inspect "$name" --format '{{.State.Running}}')" = true ] || break
    sleep 1
done
if healthy; then
    pass "health check" "healthy after $tries s"
else
    fail "health check" "not healthy after $tries s; the log ends with:"
    "$engine" logs "$name" 2>&1 | tail -n 20
    exit 1
fi

user=$("$engine" exec "$name" id -u):$("$engine" exec "$name" id -g)
[ "${user%%:*}" != 0 ] && pass user "$user" || fail user "runs as root"

init=$("$engine" exec "$name" sh -c 'tr "\0" " " < /proc/1/cmdline')
case $init in
    tini*) pass "process 1" "$init" ;;
    *) fail "process 1" "$init" ;;
esac

if "$engine" exec "$name" sh -c 'touch /opt/probe' 2>/dev/null; then
    fail "root file system" writable
else
    pass "root file system" read-only
fi

capabilities=$("$engine" exec "$name" sh -c 'grep CapEff /proc/self/status | tr -dc 0-9a-f | tail -c 16')
[ "$capabilities" = 0000000000000000 ] && pass capabilities none || fail capabilities "$capabilities"

request='{"model": "tiny-chat", "temperature": 0, "messages": [{"role": "user", "content": "What is the capital of France?"}]'
post="import json, sys, urllib.request
def post(body):
    return urllib.request.urlopen(urllib.request.Request('$url/v1/chat/completions', body.encode(),
        {'content-type': 'application/json'}), timeout=60)
"
whole=$(ask "$post
print(json.load(post('''$request}'''))['choices'][0]['message']['content'])" 2>&1)
case $whole in
    *Paris*) pass "chat" "$whole" ;;
    *) fail "chat" "$whole" ;;
esac

streamed=$(ask "$post
lines = [line[6:] for line in post('''$request, \"stream\": true}''').read().decode().splitlines() if line]
assert lines.pop() == '[DONE]', lines
deltas = [json.loads(line)['choices'][0]['delta'].get('content') or '' for line in lines]
print(''.join(deltas))" 2>&1)
[ "$streamed" = "$whole" ] && pass "chat, streamed" "the same text" || fail "chat, streamed" "$streamed"

series=$(ask "import urllib.request
text = urllib.request.urlopen('$url/metrics', timeout=10).read().decode()
print(next(line for line in text.splitlines() if line.startswith('wavefill_generation_tokens_total')))" 2>&1)
case $series in
    *' 0.0' | '') fail metrics "$series" ;;
    wavefill_*) pass metrics "$series" ;;
    *) fail metrics "$series" ;;
esac

start=$(date +%s)
"$engine" stop -t 45 "$name" >/dev/null 2>&1
code=$("$engine" inspect "$name" --format '{{.State.ExitCode}}')
[ "$code" = 0 ] && pass SIGTERM "exit code 0 after $(($(date +%s) - start)) s" || fail SIGTERM "exit code $code"

[ "$failed" = 0 ] && echo "$image: all checks passed" || echo "$image: see FAIL above"
exit "$failed"

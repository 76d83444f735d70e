# Ruby with Debian's ruby-grpc and protobuf-compiler-grpc.
set -e
here=$(realpath "$(dirname "$0")") proto=$1 out=$2
shift 2  # what is left: the service's file and those it imports
cd "$proto"
protoc --ruby_out="$out" --grpc_out="$out" --plugin=protoc-gen-grpc="$(command -v grpc_ruby_plugin)" "$@"
printf '#!/bin/sh\nexec ruby -W0 -I %s %s "$@"\n' "$out" "$here/client.rb" >"$out/client"
chmod +x "$out/client"

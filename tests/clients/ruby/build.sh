# Ruby with Debian's ruby-grpc and protobuf-compiler-grpc.
set -e
here=$(realpath "$(dirname "$0")") proto=$1 out=$2
cd "$proto"
for name in error generation model sampling; do
  protoc --ruby_out="$out" --grpc_out="$out" --plugin=protoc-gen-grpc="$(command -v grpc_ruby_plugin)" "kvern/v1/$name.proto"
done
printf '#!/bin/sh\nexec ruby -W0 -I %s %s "$@"\n' "$out" "$here/client.rb" >"$out/client"
chmod +x "$out/client"

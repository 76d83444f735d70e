# Go with Debian's golang-google-grpc-dev and golang-google-protobuf-dev: no module is fetched.
set -e
here=$(realpath "$(dirname "$0")") proto=$1 out=$2
shift 2  # what is left: the service's file and those it imports
export GO111MODULE=off GOPATH="$out/go:/usr/share/gocode" GOFLAGS=-p=2
for plugin in protobuf/cmd/protoc-gen-go grpc/cmd/protoc-gen-go-grpc; do
  go build -o "$out/$(basename $plugin)" "google.golang.org/$plugin"
done
mkdir -p "$out/go/src"
package=
for file in "$@"; do package="$package,M$file=kvern/v1"; done
cd "$proto"
PATH="$out:$PATH" protoc --go_out="paths=import$package:$out/go/src" --go-grpc_out="paths=import$package:$out/go/src" \
  "$@"
go build -o "$out/client" "$here"/*.go

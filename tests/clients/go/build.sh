# Go with Debian's golang-google-grpc-dev and golang-google-protobuf-dev: no module is fetched.
set -e
here=$(realpath "$(dirname "$0")") proto=$1 out=$2
export GO111MODULE=off GOPATH="$out/go:/usr/share/gocode" GOFLAGS=-p=2
for plugin in protobuf/cmd/protoc-gen-go grpc/cmd/protoc-gen-go-grpc; do
  go build -o "$out/$(basename $plugin)" "google.golang.org/$plugin"
done
mkdir -p "$out/go/src"
package=
for name in error generation model sampling; do package="$package,Mkvern/v1/$name.proto=kvern/v1"; done
cd "$proto"
PATH="$out:$PATH" protoc --go_out="paths=import$package:$out/go/src" --go-grpc_out="paths=import$package:$out/go/src" \
  kvern/v1/error.proto kvern/v1/generation.proto kvern/v1/model.proto kvern/v1/sampling.proto
go build -o "$out/client" "$here"/*.go

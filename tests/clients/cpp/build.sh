# C++ with Debian's libgrpc++-dev and protobuf-compiler-grpc.
set -e
here=$(realpath "$(dirname "$0")") proto=$1 out=$2
files="error generation model sampling"
cd "$proto"
for name in $files; do
  protoc --cpp_out="$out" --grpc_out="$out" --plugin=protoc-gen-grpc="$(command -v grpc_cpp_plugin)" "kvern/v1/$name.proto"
done
cd "$out"
sources="kvern/v1/generation.grpc.pb.cc"
for name in $files; do sources="$sources kvern/v1/$name.pb.cc"; done
for source in $sources "$here/client.cc"; do
  echo "$source"
done | xargs -P "$(nproc)" -I{} sh -c 'g++ -std=c++17 -O0 -w -I. -c "$1" -o "$(basename "$1").o"' _ {}
g++ ./*.o -o client -lgrpc++ -lgrpc -lgpr -lprotobuf -labsl_synchronization -lpthread

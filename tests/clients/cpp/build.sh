# C++ with Debian's libgrpc++-dev and protobuf-compiler-grpc.
set -e
here=$(realpath "$(dirname "$0")") proto=$1 out=$2
shift 2  # what is left: the service's file and those it imports
cd "$proto"
protoc --cpp_out="$out" --grpc_out="$out" --plugin=protoc-gen-grpc="$(command -v grpc_cpp_plugin)" "$@"
cd "$out"
sources="kvern/v1/generation.grpc.pb.cc"
for file in "$@"; do sources="$sources ${file%.proto}.pb.cc"; done
for source in $sources "$here/client.cc"; do
  echo "$source"
done | xargs -P "$(nproc)" -I{} sh -c 'g++ -std=c++17 -O0 -w -I. -c "$1" -o "$(basename "$1").o"' _ {}
g++ ./*.o -o client -lgrpc++ -lgrpc -lgpr -lprotobuf -labsl_synchronization -lpthread

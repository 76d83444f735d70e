# Java 17 with Debian's libgrpc-java and protobuf-compiler-grpc-java-plugin.
set -e
here=$(realpath "$(dirname "$0")") proto=$1 out=$2
shift 2  # what is left: the service's file and those it imports
classes=
for jar in grpc-api grpc-context grpc-core grpc-netty grpc-protobuf grpc-protobuf-lite grpc-stub protobuf guava failureaccess \
  perfmark-api netty-all netty-buffer netty-codec netty-codec-http netty-codec-http2 netty-codec-socks netty-common \
  netty-handler netty-handler-proxy netty-resolver netty-transport; do
  classes="$classes:/usr/share/java/$jar.jar"
done
mkdir -p "$out/java"
cd "$proto"
protoc --java_out="$out/java" --grpc_out="$out/java" --plugin=protoc-gen-grpc="$(command -v grpc_java_plugin protoc-gen-grpc-java | head -n 1)" \
  "$@"
# An annotation that Java 9 took out of its own library.
find "$out/java" -name '*Grpc.java' -exec sed -i '/@javax.annotation.Generated/,/)$/d' {} +
javac -nowarn -proc:none -d "$out/classes" -cp "$classes" $(find "$out/java" -name '*.java') "$here/Client.java"
printf '#!/bin/sh\nexec java -Xshare:auto -XX:TieredStopAtLevel=1 -cp %s:%s Client "$@"\n' "$out/classes" "$classes" >"$out/client"
chmod +x "$out/client"

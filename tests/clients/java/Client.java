// A client in Java; ../README.md says what it does.
import io.grpc.ClientInterceptors;
import io.grpc.Context;
import io.grpc.Metadata;
import io.grpc.StatusRuntimeException;
import io.grpc.netty.GrpcSslContexts;
import io.grpc.netty.NettyChannelBuilder;
import io.grpc.stub.MetadataUtils;
import java.io.File;
import java.util.Iterator;
import java.util.concurrent.TimeUnit;
import kvern.v1.Generation.CancelRequest;
import kvern.v1.Generation.ChatInput;
import kvern.v1.Generation.ChatMessage;
import kvern.v1.Generation.GenerateRequest;
import kvern.v1.Generation.GenerateResponse;
import kvern.v1.Generation.StreamRequest;
import kvern.v1.Generation.StreamResponse;
import kvern.v1.GenerationServiceGrpc;
import kvern.v1.Sampling.SamplingParams;

public class Client {
  private final GenerationServiceGrpc.GenerationServiceBlockingStub stub;

  Client(GenerationServiceGrpc.GenerationServiceBlockingStub stub) {
    this.stub = stub;
  }

  public static void main(String[] arguments) throws Exception {
    var builder = NettyChannelBuilder.forTarget(arguments[0]);
    if (arguments.length > 1) {
      builder.sslContext(GrpcSslContexts.forClient().trustManager(new File(arguments[1])).build());
    } else {
      builder.usePlaintext();
    }
    var metadata = new Metadata();
    if (System.getenv("KVERN_API_KEY") != null) {
      var header = Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER);
      metadata.put(header, "Bearer " + System.getenv("KVERN_API_KEY"));
    }
    var channel = builder.build();
    var keyed = ClientInterceptors.intercept(channel, MetadataUtils.newAttachHeadersInterceptor(metadata));
    var client = new Client(GenerationServiceGrpc.newBlockingStub(keyed));
    say("stream", client.stream());
    say("resume", client.resume());
    say("cancel", client.cancel());
    say("deadline", client.deadline());
    channel.shutdownNow();
  }

  /** All the text of a short answer. */
  String stream() {
    var text = new StringBuilder();
    stub.generate(colors("")).forEachRemaining(response -> text.append(response.getDelta().getText()));
    return text.toString();
  }

  /** Gives the call up after some tokens, and reads the rest by the request's name. */
  String resume() throws Exception {
    var name = unique("resume");
    var text = new StringBuilder();
    int next = 0;
    // A blocking call is cancelled with the context it was made in.
    try (var context = Context.current().withCancellation()) {
      Iterator<GenerateResponse> call = context.call(() -> stub.generate(colors(name)));
      while (next < 3) {
        var delta = call.next().getDelta();
        text.append(delta.getText());
        next += delta.getTokenIdsCount();
      }
    }
    var rest = StreamRequest.newBuilder().setRequestId(name).addFromIndex(next).build();
    Iterator<StreamResponse> call = stub.stream(rest);
    call.forEachRemaining(response -> text.append(response.getEvent().getDelta().getText()));
    return text.toString();
  }

  /** Ends a long answer by its name, and returns why it says it ended. */
  String cancel() {
    var name = unique("cancel");
    var call = stub.generate(endless(name));
    boolean asked = false;
    String reason = "none";
    while (call.hasNext()) {
      var response = call.next();
      if (response.hasDelta() && !asked) {
        stub.cancel(CancelRequest.newBuilder().setRequestId(name).build());
        asked = true;
      }
      if (response.hasFinished()) {
        reason = response.getFinished().getReason().toString();
      }
    }
    return reason;
  }

  /** Gives a long answer too little time, and returns the status. */
  String deadline() {
    try {
      stub.withDeadlineAfter(150, TimeUnit.MILLISECONDS).generate(endless("")).forEachRemaining(response -> {});
    } catch (StatusRuntimeException error) {
      return error.getStatus().getCode().toString();
    }
    return "none";
  }

  static GenerateRequest colors(String name) {
    var message = ChatMessage.newBuilder().setRole("user").setContent("Name three colors.");
    return GenerateRequest.newBuilder()
        .setRequestId(name)
        .setChat(ChatInput.newBuilder().addMessages(message))
        .setSampling(SamplingParams.newBuilder().setTemperature(0).setMaxTokens(32))
        .build();
  }

  static GenerateRequest endless(String name) {
    return GenerateRequest.newBuilder()
        .setRequestId(name)
        .setPrompt("The sea")
        .setSampling(SamplingParams.newBuilder().setMaxTokens(2000).setIgnoreEos(true))
        .build();
  }

  static String unique(String what) {
    return "java-" + what + "-" + System.nanoTime();
  }

  static void say(String what, String text) {
    System.out.println(what + " " + text.replace("\n", "\\n"));
  }
}

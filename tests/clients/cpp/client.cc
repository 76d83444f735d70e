// A client in C++; ../README.md says what it does.
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <string>

#include "kvern/v1/generation.grpc.pb.h"

using namespace kvern::v1;

GenerateRequest colors(const std::string& name) {
  GenerateRequest request;
  request.set_request_id(name);
  auto* message = request.mutable_chat()->add_messages();
  message->set_role("user");
  message->set_content("Name three colors.");
  request.mutable_sampling()->set_temperature(0);
  request.mutable_sampling()->set_max_tokens(32);
  return request;
}

GenerateRequest endless(const std::string& name) {
  GenerateRequest request;
  request.set_request_id(name);
  request.set_prompt("The sea");
  request.mutable_sampling()->set_max_tokens(2000);
  request.mutable_sampling()->set_ignore_eos(true);
  return request;
}

std::string unique(const std::string& what) {
  return "cpp-" + what + "-" + std::to_string(std::chrono::system_clock::now().time_since_epoch().count());
}

void check(const grpc::Status& status) {
  if (status.ok()) return;
  std::cerr << status.error_code() << " " << status.error_message() << std::endl;
  std::exit(1);
}

void say(const std::string& what, const std::string& text) {
  std::cout << what << ' ';
  for (char c : text) c == '\n' ? std::cout << "\\n" : std::cout << c;
  std::cout << std::endl;
}

class Client {
 public:
  explicit Client(const std::shared_ptr<grpc::Channel>& channel) : stub_(GenerationService::NewStub(channel)) {}

  // All the text of a short answer.
  std::string stream() {
    auto context = this->context();
    auto call = stub_->Generate(context.get(), colors(""));
    std::string text;
    for (GenerateResponse response; call->Read(&response);) text += response.delta().text();
    check(call->Finish());
    return text;
  }

  // Gives the call up after some tokens, and reads the rest by the request's name.
  std::string resume() {
    const std::string name = unique("resume");
    StreamRequest rest;
    rest.set_request_id(name);
    std::string text;
    {
      auto context = this->context();
      auto call = stub_->Generate(context.get(), colors(name));
      int next = 0;
      for (GenerateResponse response; next < 3 && call->Read(&response);) {
        text += response.delta().text();
        next += response.delta().token_ids_size();
      }
      context->TryCancel();
      call->Finish();
      rest.add_from_index(next);
    }
    auto context = this->context();
    auto call = stub_->Stream(context.get(), rest);
    for (StreamResponse response; call->Read(&response);) text += response.event().delta().text();
    check(call->Finish());
    return text;
  }

  // Ends a long answer by its name, and returns why it says it ended.
  std::string cancel() {
    CancelRequest cancel;
    cancel.set_request_id(unique("cancel"));
    auto context = this->context();
    auto call = stub_->Generate(context.get(), endless(cancel.request_id()));
    FinishReason reason = FINISH_REASON_UNSPECIFIED;
    bool asked = false;
    for (GenerateResponse response; call->Read(&response);) {
      if (response.has_delta() && !asked) {
        CancelResponse answer;
        check(stub_->Cancel(this->context().get(), cancel, &answer));
        asked = true;
      }
      if (response.has_finished()) reason = response.finished().reason();
    }
    check(call->Finish());
    return FinishReason_Name(reason);
  }

  // Gives a long answer too little time, and returns the status.
  std::string deadline() {
    auto context = this->context();
    context->set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(150));
    auto call = stub_->Generate(context.get(), endless(""));
    for (GenerateResponse response; call->Read(&response);) {
    }
    return call->Finish().error_code() == grpc::StatusCode::DEADLINE_EXCEEDED ? "DEADLINE_EXCEEDED" : "another";
  }

 private:
  static std::unique_ptr<grpc::ClientContext> context() {
    auto context = std::make_unique<grpc::ClientContext>();
    if (const char* key = std::getenv("KVERN_API_KEY")) context->AddMetadata("authorization", std::string("Bearer ") + key);
    return context;
  }

  std::unique_ptr<GenerationService::Stub> stub_;
};

int main(int argc, char** argv) {
  auto credentials = grpc::InsecureChannelCredentials();
  if (argc > 2) {
    std::ifstream file(argv[2]);
    grpc::SslCredentialsOptions options;
    options.pem_root_certs.assign(std::istreambuf_iterator<char>(file), {});
    credentials = grpc::SslCredentials(options);
  }
  Client client(grpc::CreateChannel(argv[1], credentials));
  say("stream", client.stream());
  say("resume", client.resume());
  say("cancel", client.cancel());
  say("deadline", client.deadline());
}

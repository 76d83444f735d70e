"""A client in Python; ../README.md says what it does."""

import os
import sys
import uuid
from pathlib import Path

import grpc

from kvern.v1 import generation_pb2, generation_pb2_grpc, sampling_pb2


def colors(name: str) -> generation_pb2.GenerateRequest:
    message = generation_pb2.ChatMessage(role="user", content="Name three colors.")
    return generation_pb2.GenerateRequest(
        request_id=name,
        chat=generation_pb2.ChatInput(messages=[message]),
        sampling=sampling_pb2.SamplingParams(temperature=0, max_tokens=32),
    )


def endless(name: str) -> generation_pb2.GenerateRequest:
    sampling = sampling_pb2.SamplingParams(max_tokens=2000, ignore_eos=True)
    return generation_pb2.GenerateRequest(request_id=name, prompt="The sea", sampling=sampling)


class Client:
    def __init__(self, address: str, authority: str | None, key: str | None) -> None:
        self.channel = (
            grpc.secure_channel(address, grpc.ssl_channel_credentials(Path(authority).read_bytes()))
            if authority
            else grpc.insecure_channel(address)
        )
        self.stub = generation_pb2_grpc.GenerationServiceStub(self.channel)
        self.metadata = [("authorization", f"Bearer {key}")] if key else []

    def stream(self) -> str:
        """All the text of a short answer."""
        return "".join(
            response.delta.text for response in self.stub.Generate(colors(""), metadata=self.metadata)
        )

    def resume(self) -> str:
        """Gives the call up after some tokens, and reads the rest by the request's name."""
        name, text, index = uuid.uuid4().hex, "", 0
        call = self.stub.Generate(colors(name), metadata=self.metadata)
        for response in call:
            text += response.delta.text
            index += len(response.delta.token_ids)
            if index >= 3:
                break
        call.cancel()
        rest = generation_pb2.StreamRequest(request_id=name, from_index=[index])
        return text + "".join(
            response.event.delta.text for response in self.stub.Stream(rest, metadata=self.metadata)
        )

    def cancel(self) -> str:
        """Ends a long answer by its name, and returns why it says it ended."""
        name, asked, reason = uuid.uuid4().hex, False, "none"
        for response in self.stub.Generate(endless(name), metadata=self.metadata):
            if response.HasField("delta") and not asked:
                self.stub.Cancel(generation_pb2.CancelRequest(request_id=name), metadata=self.metadata)
                asked = True
            if response.HasField("finished"):
                reason = sampling_pb2.FinishReason.Name(response.finished.reason)
        return reason

    def deadline(self) -> str:
        """Gives a long answer too little time, and returns the status."""
        try:
            list(self.stub.Generate(endless(""), metadata=self.metadata, timeout=0.15))
        except grpc.RpcError as error:
            return str(error.code().name)
        return "none"


if __name__ == "__main__":
    address, *authority = sys.argv[1:]
    client = Client(address, authority[0] if authority else None, os.environ.get("KVERN_API_KEY"))
    for what in (client.stream, client.resume, client.cancel, client.deadline):
        print(what.__name__, what().replace("\n", "\\n"))
    client.channel.close()

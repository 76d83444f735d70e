// A client in Node; ../README.md says what it does.
const fs = require("fs");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const [address, authority] = process.argv.slice(2);
const definition = loader.loadSync("kvern/v1/generation.proto", { includeDirs: ["proto"], enums: String });
const { GenerationService } = grpc.loadPackageDefinition(definition).kvern.v1;
const credentials = authority
  ? grpc.credentials.createSsl(fs.readFileSync(authority))
  : grpc.credentials.createInsecure();
const stub = new GenerationService(address, credentials);
const metadata = new grpc.Metadata();
if (process.env.KVERN_API_KEY) metadata.set("authorization", `Bearer ${process.env.KVERN_API_KEY}`);

const colors = (requestId) => ({
  requestId,
  chat: { messages: [{ role: "user", content: "Name three colors." }] },
  sampling: { temperature: 0, maxTokens: 32 },
});
const endless = (requestId) => ({ requestId, prompt: "The sea", sampling: { maxTokens: 2000, ignoreEos: true } });
const unique = (what) => `node-${what}-${process.hrtime.bigint()}`;

// All the text of a short answer.
async function stream() {
  let text = "";
  for await (const response of stub.Generate(colors(""), metadata)) text += response.delta?.text ?? "";
  return text;
}

// Gives the call up after some tokens, and reads the rest by the request's name.
async function resume() {
  const requestId = unique("resume");
  let text = "";
  let next = 0;
  const call = stub.Generate(colors(requestId), metadata);
  call.on("error", () => {}); // what cancelling it is reported as
  for await (const { delta } of call) {
    text += delta?.text ?? "";
    next += delta?.tokenIds?.length ?? 0;
    if (next >= 3) break;
  }
  call.cancel();
  const rest = stub.Stream({ requestId, fromIndex: [next] }, metadata);
  for await (const { event } of rest) text += event.delta?.text ?? "";
  return text;
}

// Ends a long answer by its name, and returns why it says it ended.
async function cancel() {
  const requestId = unique("cancel");
  let asked = false;
  let reason = "none";
  for await (const response of stub.Generate(endless(requestId), metadata)) {
    if (response.delta && !asked) {
      asked = true;
      await new Promise((done, fail) =>
        stub.Cancel({ requestId }, metadata, (error) => (error ? fail(error) : done())),
      );
    }
    if (response.finished) reason = response.finished.reason;
  }
  return reason;
}

// Gives a long answer too little time, and returns the status.
async function deadline() {
  try {
    for await (const _ of stub.Generate(endless(""), metadata, { deadline: Date.now() + 150 }));
  } catch (error) {
    return grpc.status[error.code];
  }
  return "none";
}

(async () => {
  for (const what of [stream, resume, cancel, deadline]) {
    console.log(what.name, (await what()).replaceAll("\n", "\\n"));
  }
  stub.close();
})();

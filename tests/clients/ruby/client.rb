# A client in Ruby; ../README.md says what it does.
require "grpc"
require "securerandom"
require "kvern/v1/generation_services_pb"

include Kvern::V1

class Client
  def initialize(address, authority, key)
    credentials = authority ? GRPC::Core::ChannelCredentials.new(File.read(authority)) : :this_channel_is_insecure
    @stub = GenerationService::Stub.new(address, credentials)
    @metadata = key ? { "authorization" => "Bearer #{key}" } : {}
  end

  # All the text of a short answer.
  def stream
    @stub.generate(colors(""), metadata: @metadata).map { |response| text_of(response) }.join
  end

  # Gives the call up after some tokens, and reads the rest by the request's name.
  def resume
    name = "ruby-#{SecureRandom.hex(8)}"
    call = @stub.generate(colors(name), metadata: @metadata, return_op: true)
    text, index = +"", 0
    call.execute.each do |response|
      text << text_of(response)
      index += response.delta ? response.delta.token_ids.size : 0
      break if index >= 3
    end
    call.cancel
    rest = @stub.stream(StreamRequest.new(request_id: name, from_index: [index]), metadata: @metadata)
    text + rest.map { |response| text_of(response.event) }.join
  end

  # Ends a long answer by its name, and returns why it says it ended.
  def cancel
    name = "ruby-#{SecureRandom.hex(8)}"
    asked, reason = false, nil
    @stub.generate(endless(name), metadata: @metadata).each do |response|
      if response.delta && !asked
        @stub.cancel(CancelRequest.new(request_id: name), metadata: @metadata)
        asked = true
      end
      reason = response.finished.reason if response.finished
    end
    reason.to_s
  end

  # Gives a long answer too little time, and returns the status.
  def deadline
    @stub.generate(endless(""), metadata: @metadata, deadline: Time.now + 0.15).each { |response| response }
    "none"
  rescue GRPC::DeadlineExceeded
    "DEADLINE_EXCEEDED"
  end

  private

  def text_of(response)
    response.delta ? response.delta.text : ""
  end

  def colors(name)
    GenerateRequest.new(
      request_id: name,
      chat: ChatInput.new(messages: [ChatMessage.new(role: "user", content: "Name three colors.")]),
      sampling: SamplingParams.new(temperature: 0, max_tokens: 32)
    )
  end

  def endless(name)
    GenerateRequest.new(
      request_id: name, prompt: "The sea", sampling: SamplingParams.new(max_tokens: 2000, ignore_eos: true)
    )
  end
end

client = Client.new(ARGV[0], ARGV[1], ENV["KVERN_API_KEY"])
%i[stream resume cancel deadline].each do |what|
  puts "#{what} #{client.send(what).gsub("\n", '\n')}"
end

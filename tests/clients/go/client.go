// A client in Go; ../README.md says what it does.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	pb "kvern/v1"
)

type client struct {
	stub    pb.GenerationServiceClient
	context context.Context
}

func main() {
	security := grpc.WithInsecure()
	if len(os.Args) > 2 {
		authority, err := credentials.NewClientTLSFromFile(os.Args[2], "")
		check(err)
		security = grpc.WithTransportCredentials(authority)
	}
	connection, err := grpc.Dial(os.Args[1], security)
	check(err)
	defer connection.Close()
	ctx := context.Background()
	if key := os.Getenv("KVERN_API_KEY"); key != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+key)
	}
	c := client{pb.NewGenerationServiceClient(connection), ctx}
	say("stream", c.stream())
	say("resume", c.resume())
	say("cancel", c.cancel())
	say("deadline", c.deadline())
}

// stream returns all the text of a short answer.
func (c client) stream() string {
	call, err := c.stub.Generate(c.context, colors(""))
	check(err)
	text := ""
	for {
		response, err := call.Recv()
		if response == nil {
			return text + failure(err)
		}
		text += response.GetDelta().GetText()
	}
}

// resume gives the call up after some tokens, and reads the rest by the request's name.
func (c client) resume() string {
	name := unique("resume")
	ctx, giveUp := context.WithCancel(c.context)
	call, err := c.stub.Generate(ctx, colors(name))
	check(err)
	text, next := "", uint32(0)
	for next < 3 {
		response, err := call.Recv()
		check(err)
		text += response.GetDelta().GetText()
		next += uint32(len(response.GetDelta().GetTokenIds()))
	}
	giveUp()
	rest, err := c.stub.Stream(c.context, &pb.StreamRequest{RequestId: name, FromIndex: []uint32{next}})
	check(err)
	for {
		response, err := rest.Recv()
		if response == nil {
			return text + failure(err)
		}
		text += response.GetEvent().GetDelta().GetText()
	}
}

// cancel ends a long answer by its name, and returns why it says it ended.
func (c client) cancel() string {
	name := unique("cancel")
	call, err := c.stub.Generate(c.context, long(name))
	check(err)
	for asked := false; ; {
		response, err := call.Recv()
		check(err)
		if response.GetDelta() != nil && !asked {
			_, err = c.stub.Cancel(c.context, &pb.CancelRequest{RequestId: name})
			check(err)
			asked = true
		}
		if response.GetFinished() != nil {
			return response.GetFinished().GetReason().String()
		}
	}
}

// deadline gives a long answer too little time, and returns the status.
func (c client) deadline() string {
	ctx, done := context.WithTimeout(c.context, 150*time.Millisecond)
	defer done()
	call, err := c.stub.Generate(ctx, long(""))
	for err == nil {
		_, err = call.Recv()
	}
	if status.Code(err) == codes.DeadlineExceeded {
		return "DEADLINE_EXCEEDED"
	}
	return status.Code(err).String()
}

func colors(name string) *pb.GenerateRequest {
	temperature, maxTokens := float32(0), uint32(32)
	return &pb.GenerateRequest{
		RequestId: name,
		Input: &pb.GenerateRequest_Chat{Chat: &pb.ChatInput{
			Messages: []*pb.ChatMessage{{Role: "user", Content: "Name three colors."}},
		}},
		Sampling: &pb.SamplingParams{Temperature: &temperature, MaxTokens: &maxTokens},
	}
}

func long(name string) *pb.GenerateRequest {
	maxTokens := uint32(2000)
	return &pb.GenerateRequest{
		RequestId: name,
		Input:     &pb.GenerateRequest_Prompt{Prompt: "The sea"},
		Sampling:  &pb.SamplingParams{MaxTokens: &maxTokens, IgnoreEos: true},
	}
}

func unique(what string) string { return fmt.Sprintf("go-%s-%d", what, time.Now().UnixNano()) }

func say(what, text string) { fmt.Println(what, strings.ReplaceAll(text, "\n", "\\n")) }

func failure(err error) string {
	if err.Error() == "EOF" {
		return ""
	}
	return " " + err.Error()
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

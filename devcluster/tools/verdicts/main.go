// Command verdicts says how tools that deploy objects read them: kstatus, as in Flux and Helm, and a health script of
// Argo CD, run as Argo CD runs it.
//
//	verdicts HEALTH.lua < OBJECTS
//
// OBJECTS are JSON, one after another; for each a line of JSON is printed, with the keys kstatus, argocd and message.
package main

import (
	"encoding/json"
	"errors"
	"io"
	"log"
	"os"

	// The kstatus that Helm brings along; its package `status` is the same as that of sigs.k8s.io/cli-utils.
	"github.com/fluxcd/cli-utils/pkg/kstatus/status"
	lua "github.com/yuin/gopher-lua"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

func main() {
	script, err := os.ReadFile(os.Args[1])
	if err != nil {
		log.Fatal(err)
	}
	in, out := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	for {
		var object unstructured.Unstructured
		if err := in.Decode(&object); errors.Is(err, io.EOF) {
			return
		} else if err != nil {
			log.Fatal(err)
		}
		verdict, err := status.Compute(&object)
		if err != nil {
			log.Fatal(err)
		}
		health, message := run(string(script), object.Object)
		out.Encode(map[string]string{"kstatus": string(verdict.Status), "argocd": health, "message": message})
	}
}

// run returns the status and the message of the table that the script returns for an object. Like Argo CD, it gives the
// script the libraries `base` and `table` alone.
func run(script string, object map[string]any) (string, string) {
	state := lua.NewState(lua.Options{SkipOpenLibs: true})
	defer state.Close()
	for name, library := range map[string]lua.LGFunction{lua.BaseLibName: lua.OpenBase, lua.TabLibName: lua.OpenTable} {
		state.Push(state.NewFunction(library))
		state.Push(lua.LString(name))
		state.Call(1, 0)
	}
	state.SetGlobal("obj", value(state, object))
	if err := state.DoString(script); err != nil {
		log.Fatal(err)
	}
	health, ok := state.Get(-1).(*lua.LTable)
	if !ok {
		log.Fatalf("the script returns a %s and not a table", state.Get(-1).Type())
	}
	return state.GetField(health, "status").String(), state.GetField(health, "message").String()
}

func value(state *lua.LState, of any) lua.LValue {
	switch of := of.(type) {
	case bool:
		return lua.LBool(of)
	case string:
		return lua.LString(of)
	case int64:
		return lua.LNumber(of)
	case float64:
		return lua.LNumber(of)
	case []any:
		table := state.NewTable()
		for _, item := range of {
			table.Append(value(state, item))
		}
		return table
	case map[string]any:
		table := state.NewTable()
		for key, item := range of {
			table.RawSetString(key, value(state, item))
		}
		return table
	default:
		return lua.LNil
	}
}

// Package mutation proves the tests. It breaks the code in ways that break the
// protocol's promise, one at a time, and checks that the tests named for it
// notice. The tree stays as it is: go test gets each mutation as an overlay.
//
//	MUTATIONS=1 go test -v ./internal/mutation
//	MUTATIONS=1 go test -v ./internal/mutation -run 'TestMutations/lua'
//
// It takes minutes, so it is no part of an ordinary run.
package mutation

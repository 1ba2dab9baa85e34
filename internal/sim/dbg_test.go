package sim_test
import ("testing";"fmt";"os";"strconv")
func TestDbg(t *testing.T) {
	seed, _ := strconv.Atoi(os.Getenv("DBG"))
	s := drawn.Example(seed)
	dbg = true
	runAnd(t, s, func(w *world) { fmt.Println(w.judge.wrong) })
}

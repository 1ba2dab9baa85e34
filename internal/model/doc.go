// Package model checks the lease protocol itself, apart from any code: a model
// of one key, two nodes and a network that loses, delays and doubts, in Promela.
// The model checker spin visits every state it can get into, whatever the nodes
// ask for, spend and return, for as long as they run. README.md says what that
// covers and what it does not.
//
//	internal/model/run.sh
//
// An ordinary test run includes it where spin and gcc are installed.
package model

// Package fallback keeps limiting when the store fails.
package fallback

"""transformers' own tests of Trainer, run with a pipelined one: `make trainer-suite TRANSFORMERS=<checkout>`."""

"""transformers' own tests of its Trainer, run on a pipelined one: `make trainer-suite TRANSFORMERS=<checkout>`."""

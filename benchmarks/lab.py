"""The program that the benchmarks' commands belong to."""

from ctx_compress_rag.cli.shared import program

lab = program("python -m benchmarks")

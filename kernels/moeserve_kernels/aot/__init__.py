"""Compiling every kernel for chips that are not here, and judging what comes out.

``python -m moeserve_kernels.aot`` needs no GPU: the compilers of both vendors come with Triton. It
finds what tests in the interpreter can not: registers spilled to memory, more shared memory than a
chip has (the compilers do not check it), slow matrix instructions, registers grown since the last
table.
"""

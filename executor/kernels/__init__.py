"""The operations of a decoder in Triton: one a module, each with its launcher and the cases it is compiled for.

``ops.TritonOps`` offers them as ``executor.ops.Ops``.  A module needs Triton when it is imported, a GPU only when it is
launched; with TRITON_INTERPRET=1 set before that import it runs, slowly, on a CPU.
"""

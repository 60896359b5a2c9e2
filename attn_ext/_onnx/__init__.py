"""The ops in standard ONNX operators.

`lowering` writes attention once, over the few operators of `operators`; these are there twice: as PyTorch
functions, for calls that ``torch.onnx.export`` traces (`tracing`), and as ONNX nodes, for programs that were
exported before (`nodes`).
"""

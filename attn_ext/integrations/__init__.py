"""What brings the op to models as they are: PyTorch's functions and modules, and libraries, one module each.

None of the libraries is imported before its module is called.
"""

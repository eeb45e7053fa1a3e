"""One command for a machine with a GPU: is every kernel right, and how near is it to the limits.

``python -m moeserve_kernels.gpucheck --output lines.jsonl`` needs torch and triton only, and stops
after ``--minutes``. ``--dry`` runs all of it on a CPU with tiny sizes.
"""

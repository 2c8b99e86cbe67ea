"""The CPU kernels in tests: none, whatever the user of this machine has built, but where a test asks for them."""

from selfspec.kernels import native

# Taken before a fixture puts another in its place.
load_kernels = native.load_kernels
build_kernels = native.build_kernels

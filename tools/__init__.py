"""Scripts of the build and of `make`; not part of the installed package."""

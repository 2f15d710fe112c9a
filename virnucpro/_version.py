"""The version of this program, for modules below the public interface."""

__version__ = "0.1.0"

"""Engine connectors. Each imports its engine; none is imported by the package itself."""

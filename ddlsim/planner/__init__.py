"""From questions to a decision: rules of thumb, and the search for the configuration that meets a target."""

"""A package by SGLang's name, for the tests alone: a server that answers what SGLang's published interface says."""

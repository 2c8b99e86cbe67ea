"""The command line, one file a command. torch and transformers are imported in commands, to answer quickly."""

"""The recurrent states of sequences, on the host's side: which one each has."""

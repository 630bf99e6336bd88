"""Products of few tokens with dense weights, with what surrounds them in a decoder, as one kernel each."""

"""Models of images and text: the tower, and the decoder that is shown what it made."""

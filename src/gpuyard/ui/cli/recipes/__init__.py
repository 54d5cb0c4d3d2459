"""Commands that run many jobs: batch, datagen, render, workspace."""

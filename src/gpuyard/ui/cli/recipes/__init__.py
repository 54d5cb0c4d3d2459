"""Verbs that run many jobs or a manifest: batch, datagen, render, workspace."""

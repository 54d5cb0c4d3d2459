"""The command line, `gpuyard top`, the files of the web page, and views that commands share."""

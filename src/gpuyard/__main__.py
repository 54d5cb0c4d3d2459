from gpuyard.ui.cli import main

main()

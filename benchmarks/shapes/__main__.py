from benchmarks.shapes.directory import main

main()
